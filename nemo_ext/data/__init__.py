"""Sources, tokenisation and blends. No torch at module level."""
