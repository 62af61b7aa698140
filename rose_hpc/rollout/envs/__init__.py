"""Multi-turn text environments: `base` is the protocol and the way to make one, the other modules are the environments."""
