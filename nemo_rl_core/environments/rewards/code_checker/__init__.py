"""What runs inside the two sandboxes of a completion's unit tests; standard library only.

`program` runs the completion and answers calls, `checker` runs the row's tests and makes the calls,
and `plain` is the language between them. `names` decides whose a name of a test is. `row` runs a
row's tests without a program.
"""
