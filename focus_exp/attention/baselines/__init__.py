"""Published methods and controls under the same contract."""
