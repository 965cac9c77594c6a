"""Open requests go on when scheduler and worker have been started again."""
