"""The published FineWeb token files of Parameter Golf: read, write, import, export."""
