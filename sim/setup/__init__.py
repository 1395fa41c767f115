"""From words to a checked run: names resolved, shapes, needs and memory fitted."""
