"""Books one replica: which requests wait, run or move, their KV, deadlines, steps, and why one was missed."""
