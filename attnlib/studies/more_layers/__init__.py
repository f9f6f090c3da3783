"""Other layers, learnt cold: a judge's, until it had judged."""
