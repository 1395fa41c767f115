"""Several replicas behind a router, as SimPy processes around their engines; runs of one replica never load it."""
