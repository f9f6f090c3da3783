"""From a study to its records: fresh processes, the store, rounds, frames, figures."""
