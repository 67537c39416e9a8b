# Prepares the guide for Doxygen: links to headings and to files outside of include/ become text.
s/\[([^]]*)\]\((#|\.\.)[^)]*\)/\1/g
