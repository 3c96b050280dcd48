"""Cost models: predict what the clock will say, and by how much to distrust it."""
