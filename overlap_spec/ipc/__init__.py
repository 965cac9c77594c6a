"""Links between processes: ZeroMQ sockets, the step link's Unix sockets, their addresses."""
