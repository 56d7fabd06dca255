"""In instructions, by machines that count them: `make vm-bench`, `make series-cost`, and others."""
