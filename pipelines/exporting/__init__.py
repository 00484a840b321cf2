"""What the export job is made of: where weights come from, the two layouts, and the proof in a fresh process."""
