"""Reports on recorded runs: numbers, sentences, an HTML page, and comparisons."""
