"""How the outputs of a request come about: streamed, the best of several, a beam search, or none."""
