"""Policies of compress beyond the core's: priced, exact, learned, and a remedy for compositions that break early."""
