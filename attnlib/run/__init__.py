"""From a study to its records: grids, jobs, workers, the store."""
