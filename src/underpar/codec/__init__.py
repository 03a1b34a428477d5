"""Files <-> fewer bytes, through the artifact: the proof that its score is real."""
