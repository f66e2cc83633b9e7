"""Code that runs in the two sandboxes of a completion's unit tests; standard library only.

`program` runs the completion and answers calls, `checker` runs the row's tests and makes the calls.
`plain` encodes the data that the two exchange, `remote` represents the program's objects in a test,
`expected` tracks which of the program's exceptions a test catches, and `names` decides where a name
of a test comes from. `row` runs a row's tests without a program.
"""
