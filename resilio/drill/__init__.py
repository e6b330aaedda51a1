"""How a drill is run and judged."""
