"""The core: who is resident, when what happens, what is counted, in one module that may be compiled."""
