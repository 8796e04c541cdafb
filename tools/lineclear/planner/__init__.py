"""The capacity planner, `lineclear simulate`: the core on a virtual clock, with steps that take a fitted time."""
