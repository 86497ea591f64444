"""Small models that see or hear, made on first use: SmolLM2-135M, and in front of it a tower and what joins the two."""
