"""Replicas that run elsewhere: in Ray actors (`ray`). `remote` is what such hosts have in common."""
