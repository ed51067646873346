"""What a run leaves on disk: facts, typed, with where they come from. No sentence, no table, no torch."""
