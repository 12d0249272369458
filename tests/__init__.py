"""The project's tests, and in `servers/` the throw-away databases, engines and clusters that benchmarks and examples use too. A
package of its own, since some dependencies install one of the same name."""
