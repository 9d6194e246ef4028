"""Simulates clusters in virtual time: on the virtual event loop, and on a queue of events, which is faster.

Both drive the same `Replica`. On the queue a plan that stays the same (`Plan.repeat_steps`) is carried out many steps
at a time. Tests hold the two equal event for event.
"""
