"""A replica for simulation at speed: the state that `Replica` keeps, counted instead of walked.

A running sequence with one pending token advances by one token in every step that decodes, so its lengths follow from
the number of steps; a plan that stays the same (`Plan.steady`) is carried out many steps at a time. Tests hold it equal
to `Replica`, `LocalHost` and engine event for event.
"""
