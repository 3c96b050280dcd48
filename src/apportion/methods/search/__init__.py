"""Search: which micro-choices are better at equal measured cost, with a stated confidence."""
