"""The command `plan`: the planner's answers in the terminal."""
