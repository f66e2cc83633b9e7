"""What plays: environments that answer, so that the policy has another turn.

`games` has the games, `replies` one row of an `EnvironmentReturn`. Tools are beside, in `tools`.
"""
