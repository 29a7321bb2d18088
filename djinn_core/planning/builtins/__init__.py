"""The planning plugins that are part of Djinn: cost model, placement policies and the scheduler, and what they compute with."""
