"""The real machine: the verbs of `sim.machine.protocol.Machine` carried out, on a CUDA GPU or on the CPU backend."""
