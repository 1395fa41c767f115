"""One file per published offloading policy; files are found by walking this package, nothing is registered."""

import sim as sim  # it decides which of these modules run compiled (`sim.base.compiled`)
