"""Jobs as other programs describe them, torchtitan and Hugging Face, and how fast such models train."""
