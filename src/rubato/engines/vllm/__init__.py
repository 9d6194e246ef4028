"""Our schedulers inside an unmodified vLLM: `--scheduler-cls rubato.engines.vllm.scheduler.RubatoScheduler`.

`scheduler` is the plug-in and the only module that imports vllm; `bookkeeping` decides and keeps the books; `sequence`
shows vLLM's requests to a policy. docs/vllm.md tells how to start it and where vLLM's reality and ours differ.
"""
