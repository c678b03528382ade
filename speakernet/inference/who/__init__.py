"""Find who speaks when in a recording: detect speech, embed windows, cluster them, and name people
in a store.
"""
