"""What the series costs and saves, in instructions."""
