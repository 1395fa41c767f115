"""The real machine: the verbs of `sim.machine.protocol`, carried out and timed."""
