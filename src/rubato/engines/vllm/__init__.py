"""Our schedulers inside an unmodified vLLM: `--scheduler-cls rubato.vllm.Scheduler`.

`scheduler` is the plug-in, which with `queues`, `kv_view` and `deviations` alone imports vllm; `policy_driver` has each
step, `open_requests` the requests, `reporting` what is passed on, `guards` the faults; `drafts` and `sequence` show
vLLM's drafts and requests to a policy; `settings` reads `--additional-config`.
docs/vllm.md tells how to start it and where vLLM's reality and ours differ.
"""
