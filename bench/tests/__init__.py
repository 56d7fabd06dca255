"""Those of bench/."""
