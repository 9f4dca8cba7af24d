"""Looking: plans before a run, reports after it. Nothing but main.py depends on this room."""
