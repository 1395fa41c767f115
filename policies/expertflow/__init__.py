"""ExpertFlow (arXiv 2410.17954): the whole routing path foretold, slots given to layers by what they will need."""

from policies.expertflow.policy import ExpertFlow as ExpertFlow
