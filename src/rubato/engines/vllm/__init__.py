"""Our schedulers inside an unmodified vLLM: `--scheduler-cls rubato.vllm.Scheduler`.

`scheduler` is the plug-in, which with `kv_view` alone imports vllm; `policy_driver` decides and keeps the books;
`drafts` and `sequence` show vLLM's drafts and requests to a policy; `settings` reads `--additional-config`.
docs/vllm.md tells how to start it and where vLLM's reality and ours differ.
"""
