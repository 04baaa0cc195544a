"""Reports on recorded runs: numbers, sentences, an HTML page, and comparisons of two runs."""
