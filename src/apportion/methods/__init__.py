"""The four methods; each is policies, rules and training on the core loop."""
