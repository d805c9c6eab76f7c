"""The planner: closed-form models of memory and traffic, without torch."""
