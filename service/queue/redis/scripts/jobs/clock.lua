-- Return queue time, Unix seconds, as text.

return string.format('%.6f', now_s())
