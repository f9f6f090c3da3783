"""What `auto` resolves to, release by release."""
