"""What ran: every op with its module, dtypes, rule, casts and time; and what is wasted."""
