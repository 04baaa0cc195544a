"""Calls that run the user's code in between: closures, retries, blocks of accumulation."""
