"""Other ways to choose pairs, under the same contract: controls and published methods."""
