"""Scheduling and routing policies, one file each; a module's name is the policy's name."""
